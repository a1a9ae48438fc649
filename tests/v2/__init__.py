"""The connector with vLLM's model runner V2, the default on GPUs, run on a CPU."""
