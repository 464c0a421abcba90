"""Runs reward functions in supervised processes.

Read `reward_pool.py`: it scores finished samples while others are still generated, and reports failures instead of
zeros. Imports `workers/pool/`.
"""
