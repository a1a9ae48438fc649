"""Runs the real engine on one NVIDIA GPU: packs vLLM into a small folder, and checks it there."""
