"""The load of the gateway's cost benchmark: a simulated engine, stand-ins and a client."""
