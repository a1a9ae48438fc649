"""``python -m ragcache_cli`` is the ``ragcache`` command."""

from ragcache_cli.main import main

if __name__ == "__main__":
    main()
