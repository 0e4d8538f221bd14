"""Channels: how a tensor gets from one rank to another. The communicator alone calls them, from its one thread."""
