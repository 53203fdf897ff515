"""What observes a foreign training script from inside its process.

This directory is put on PYTHONPATH of the script, whose Python may belong to another environment. So its modules import
only the standard library and, once the script has done so, torch.
"""
