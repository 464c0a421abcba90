"""The wire format of `protocol.DataProto`: how a batch becomes bytes between processes, and a batch again.

Read `wire.py`; `meta.py` merges and compares columns and meta_info. Imports only torch and numpy, so that worker
processes can load it before anything else.
"""
