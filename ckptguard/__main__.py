"""``python -m ckptguard``: the same as the ``ckptguard`` command."""

from ckptguard.cli.main import main

if __name__ == "__main__":
    main()
