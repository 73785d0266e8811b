"""``python -m lightning_hetero``: the same commands as ``lightning-hetero``."""

from lightning_hetero.cli import main

if __name__ == "__main__":
    main()
