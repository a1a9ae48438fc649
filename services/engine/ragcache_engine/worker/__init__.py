"""The connector's side in vLLM's worker process: it loads, writes, recomputes and saves KV."""
