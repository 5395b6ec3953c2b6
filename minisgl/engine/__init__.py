"""One rank's engine: weights, KV pool and the forward of a step. Importing this package alone loads none of them."""
