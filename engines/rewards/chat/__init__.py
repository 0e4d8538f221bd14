"""Engines that complete chat conversations: the interface, an OpenAI-compatible endpoint, a model in this process."""
