"""The parts of the strategy `mesh`: stages of the decoder, and one module for each way to split them."""
