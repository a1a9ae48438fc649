"""Your own LangChain retriever in front of RagCache: it retrieves, RagCache reuses the KV.

python examples/clients/langchain_retriever.py URL MODEL QUESTION [QUESTION ...]
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

HANDBOOK = [
    Document("Billing runs in the region eu-north.", metadata={"source": "billing.md"}),
    Document("Search runs in the region us-east.", metadata={"source": "search.md"}),
    Document("Backups are written every night at two.", metadata={"source": "backup.md"}),
]


def passages(documents: list[Document]) -> list[dict[str, Any]]:
    """Return documents as RagCache takes them, best first."""
    named = ((one.page_content, one.metadata) for one in documents)
    return [
        {"text": text, "id": data["source"], "title": data.get("title", "")} for text, data in named
    ]


def answer(llm: ChatOpenAI, retriever: BaseRetriever, question: str) -> BaseMessage:
    """Answer from what the retriever finds. The prompt is made by RagCache."""
    options = {"passages": passages(retriever.invoke(question)), "order": "cached"}
    return llm.invoke(question, extra_body={"ragcache": options})


def main() -> None:
    """Answer each question."""
    url, model, *questions = sys.argv[1:]
    # Any vector store will do. This one needs no model, and so finds documents at random.
    store = InMemoryVectorStore.from_documents(HANDBOOK, DeterministicFakeEmbedding(size=64))
    llm = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        model=model,
        temperature=0,
        max_completion_tokens=32,
    )
    for question in questions:
        message = answer(llm, store.as_retriever(search_kwargs={"k": 3}), question)
        usage = message.response_metadata["token_usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"{usage['prompt_tokens']} prompt tokens, {cached} reused: {message.content!r}")


if __name__ == "__main__":
    main()
