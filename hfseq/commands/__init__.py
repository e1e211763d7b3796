"""The commands of ``hfseq``, a module each: its flags (``add_…``) and what it does (``run_…``).

What is heavy is imported when a command runs, so that ``--help`` answers at once.
"""
