"""`python -m octavo` is `octavo`."""

from octavo.cli import app

if __name__ == "__main__":
    app()
