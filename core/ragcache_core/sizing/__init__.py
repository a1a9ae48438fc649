"""The sizes of a platform that follow from its model, its documents and its traffic."""
