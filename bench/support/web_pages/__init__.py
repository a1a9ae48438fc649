"""Web pages as generators write them, made so that each word is known to be text or navigation."""
