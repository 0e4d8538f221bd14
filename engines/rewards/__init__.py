"""Rewards: the interface, the registry, the toy's pixel judge, and judges with models: CLIP, OCR, and those that write.

A judge that writes is a chat engine (`chat`), which completes conversations with images, and a protocol (`protocols`),
a pure function that turns videos and replies into the next question or the outcome. `judging` holds the conversations,
`judges` makes rewards of them, `build` reads what the user wrote.
"""
