"""``python -m attnzoo`` is the command line ``attnzoo``."""

from attnzoo.cli import main

if __name__ == "__main__":
    main()
