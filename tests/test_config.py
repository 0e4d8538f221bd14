"""Properties of the configuration: which source wins, what an error says, and that a dump reads back."""

from typing import Annotated, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner
from msgspec import Meta

from asyncflow.config import dump, resolve
from asyncflow.errors import CheckpointError, ConfigError
from asyncflow.options import options, run


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """Every kind of field that a configuration may have."""

    steps: Annotated[int, Meta(description="Number of RL steps.", ge=1)] = 100
    group_size: Annotated[int, Meta(description="Candidates of a prompt.", ge=2, le=64)] = 8
    lr: Annotated[float, Meta(description="Learning rate.", gt=0)] = 1e-5
    exact: Annotated[bool, Meta(description="Sum gradients as integers.")] = False
    schedule: Annotated[Literal["colocated", "stagebreaker"], Meta(description="Order of the tasks.")] = "stagebreaker"
    model: Annotated[str | None, Meta(description="A diffusers folder.")] = None
    out: Annotated[str, Meta(description="The run's directory.")] = ""
    budget: Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="Seconds.")] = None
    reward: Annotated[tuple[str, ...], Meta(description="A reward; may be repeated.")] = ("brightness",)
    weights: Annotated[list[float], Meta(description="Weight of each reward.")] = []

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != len(self.reward):
            raise ConfigError(f"--weights: expected {len(self.reward)}, one for each reward, got {len(self.weights)}")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write run.toml into the working directory of the test."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        (tmp_path / "run.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return "run.toml"

    return write


def test_command_line_goes_before_file_before_default(write):
    file = write('steps = 5\ngroup_size = 4\nreward = ["a", "b"]\nlr = 1')
    config = resolve(Settings, {"steps": "7"}, file)
    assert (config.steps, config.group_size, config.lr, config.exact) == (7, 4, 1.0, False)
    assert config.reward == ("a", "b")


@pytest.mark.parametrize(
    "config",
    [
        Settings(),
        Settings(steps=3, lr=1e-300, exact=True, model='a "b"\\c\nd', budget=0.1 + 0.2),
        Settings(reward=("x", "y"), weights=[1.0, -0.5], schedule="colocated"),
        Settings(reward=()),
    ],
)
def test_dump_reads_back_equal(config, write):
    text = dump(config)
    assert "None" not in text
    assert "group-size" in text
    assert resolve(Settings, {}, write(text)) == config


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("steps", "0", "--steps: expected an integer of at least 1, got 0"),
        ("steps", "many", "--steps: expected an integer of at least 1, got many"),
        ("steps", "", '--steps: expected an integer of at least 1, got ""'),
        ("steps", "2.5", "--steps: expected an integer of at least 1, got 2.5"),
        ("group_size", 65, "--group-size: expected an integer of at least 2 and of at most 64, got 65"),
        ("lr", "0", "--lr: expected a finite number above 0, got 0"),
        ("lr", "nan", "--lr: expected a finite number above 0, got nan"),
        ("lr", "inf", "--lr: expected a finite number above 0, got inf"),
        ("budget", "-1", "--budget: expected a finite number of at least 0, got -1"),
        ("schedule", "fast", "--schedule: expected one of colocated, stagebreaker, got fast"),
        ("weights", ("1", "x"), '--weights: expected a list, each entry a finite number, got ["1", "x"]'),
        ("weights", ("1", "inf"), '--weights: expected a list, each entry a finite number, got ["1", "inf"]'),
        ("weights", ("1", "2"), "--weights: expected 1, one for each reward, got 2"),
    ],
)
def test_wrong_option_is_one_sentence(name, value, sentence):
    with pytest.raises(ConfigError) as error:
        resolve(Settings, {name: value})
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("group-sise = 4", 'run.toml: unknown key "group-sise"; did you mean "group-size"?'),
        ("group_sise = 4", 'run.toml: unknown key "group_sise"; did you mean "group-size"?'),
        ("steps = 0", "run.toml: steps: expected an integer of at least 1, got 0"),
        ('steps = "3"', 'run.toml: steps: expected an integer of at least 1, got "3"'),
        ("steps = true", "run.toml: steps: expected an integer of at least 1, got true"),
        ("exact = 1", "run.toml: exact: expected true or false, got 1"),
        ("lr = nan", "run.toml: lr: expected a finite number above 0, got NaN"),
        ("[steps]\na = 1", 'run.toml: steps: expected an integer of at least 1, got {"a": 1}'),
        ("group-size = 4\ngroup_size = 4", 'run.toml: the key "group-size" is given twice; keep one spelling'),
    ],
)
def test_wrong_file_is_one_sentence(text, sentence, write):
    with pytest.raises(ConfigError) as error:
        resolve(Settings, {}, write(text))
    assert str(error.value) == sentence


def test_far_off_key_lists_the_keys(write):
    with pytest.raises(ConfigError, match='unknown key "zzz"; known are budget, exact, group-size, lr, '):
        resolve(Settings, {}, write("zzz = 1"))


@pytest.mark.parametrize("content", [b"steps = ", b"steps = 1\nsteps = 2", b"model = '\xff'"])
def test_file_that_is_no_toml_is_named(content, write):
    with pytest.raises(ConfigError, match=r"^run\.toml: not a TOML file: "):
        resolve(Settings, {}, write(content))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^--config: cannot read .*none.toml: No such file"):
        resolve(Settings, {}, str(tmp_path / "none.toml"))


@click.command()
@click.option("--dry-run", is_flag=True)
@options(Settings)
def train(config: Settings, dry_run: bool) -> None:
    """Print what was resolved."""
    if dry_run:
        raise CheckpointError("--resume: no checkpoint in runs/x")
    click.echo(dump(config))


def test_options_fill_the_struct(write):
    file = write("steps = 5\nexact = true\nlr = 0.5")
    args = ["--config", file, "--no-exact", "--steps", "100", "--reward", "a", "--reward", "b", "--budget", "2"]
    result = CliRunner().invoke(train, args)
    expected = Settings(steps=100, exact=False, lr=0.5, reward=("a", "b"), budget=2.0)
    assert result.output == dump(expected) + "\n"


def test_help_shows_each_field_with_its_default():
    text = CliRunner().invoke(train, ["--help"], terminal_width=200).output
    assert "--exact / --no-exact" in text
    for words in ("--group-size N", "[default: 8]", "Candidates of a prompt.", "[colocated|stagebreaker]"):
        assert words in text
    assert '""' not in text
    assert text.index("--steps") < text.index("--weights") < text.index("--config")


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (["--group-sise", "4"], 2, "Error: No such option '--group-sise'. Did you mean '--group-size'?\n"),
        (["--steps", "0"], 2, "Error: --steps: expected an integer of at least 1, got 0\n"),
        (["--steps"], 2, "Error: Option '--steps' requires an argument.\n"),
        (["--dry-run"], 1, "Error: --resume: no checkpoint in runs/x\n"),
    ],
)
def test_run_prints_one_sentence_and_returns_the_exit_code(args, code, sentence, capsys):
    assert run(train, args) == code
    assert capsys.readouterr() == ("", sentence)


def test_run_succeeds_with_zero(capsys):
    assert run(train, ["--steps", "3"]) == 0
    assert "steps = 3" in capsys.readouterr().out
