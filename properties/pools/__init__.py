"""Pools: decoding and verifying drafts in a pool of states."""
