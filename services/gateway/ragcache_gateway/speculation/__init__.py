"""Computing the prompt of a question while its search runs."""
