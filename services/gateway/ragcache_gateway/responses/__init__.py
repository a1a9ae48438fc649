"""OpenAI's responses API, without state: requests as chats, and answers as responses."""
