"""Protocols of published judges: what they are shown and asked, and how their replies are read, as pure functions."""
