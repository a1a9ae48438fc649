"""How the parts of a platform recognize each other: tokens under the platform's signing keys."""
