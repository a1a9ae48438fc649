"""The RagCache and RagCollection objects as typed, frozen values, and their validation."""
