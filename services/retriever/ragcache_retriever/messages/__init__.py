"""Messages of the retriever's API: checks of requests and encoding of replies."""
