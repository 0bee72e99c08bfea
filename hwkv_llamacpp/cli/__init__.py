"""The hwkv command: parse, call, print."""
