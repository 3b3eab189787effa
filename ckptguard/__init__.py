"""ckptguard: checkpoint integrity and resharding for Megatron.

The rooms, from the top: ``cli`` parses and prints, ``engine`` runs plans over files, ``formats`` reads what is on disk,
``fingerprint`` digests it, ``megatron`` asks Megatron Core about structure, ``resume`` proves that a resumed run is the same run, ``report`` makes tables and JSON, and
``core`` holds the values that all of them pass around. Imports point downwards only (``pyproject.toml``).
"""

__version__ = "0.1.0"
