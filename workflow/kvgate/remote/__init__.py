"""Boards from this side: the conversation with the agent, what is brought there, what may come back."""
