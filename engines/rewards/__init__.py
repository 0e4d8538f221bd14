"""Rewards: the interface, the registry of built-in ones, and the toy's pixel judge."""
