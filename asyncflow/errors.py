"""Every error a user can meet. Each message names the option, file or task, what was expected, and what to do.

`ConfigError` and its kin are wrong use (exit code 2) and are raised before a model loads where that is possible; the
others end a running job (exit code 1).
"""


class AsyncflowError(Exception):
    """Base of all errors that asyncflow raises on purpose; its message is one clear sentence for the user."""

    exit_code = 1


class ConfigError(AsyncflowError):
    """An option, a configuration key or a prompt file is wrong."""

    exit_code = 2


class ModelError(ConfigError):
    """A model folder or an adapter is missing, incomplete or of another kind."""


class CheckpointError(AsyncflowError):
    """A checkpoint cannot be written, or is damaged, or belongs to another configuration."""


class RewardError(AsyncflowError):
    """A judge returned something that is neither a finite number nor an invalid outcome."""


class JudgeUnfit(RewardError):
    """A judge failed for a whole step or too often; raised between two steps, of which the completed ones count."""


class TrainingError(AsyncflowError):
    """Training cannot go on: gradients stayed non-finite, or the ranks' weights differ."""


class TaskFailed(AsyncflowError):
    """A task raised on a rank."""


class RankLost(AsyncflowError):
    """A rank's process ended, or its connection did, while the run needed it."""


class Interrupted(AsyncflowError):
    """Somebody wants the run to end: Ctrl-C, or SIGTERM."""

    exit_code = 130


class TransferError(AsyncflowError):
    """A transfer did not match what the sequence says is due."""
