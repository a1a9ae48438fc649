"""The bundled model: a small Llama that answers questions from service handbooks."""
