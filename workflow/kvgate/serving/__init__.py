"""What a bundle runs, on a board or a PC: text, chats, the server.

Standard library and numpy (for text tokenizers and jinja2), Python 3.9.
"""
