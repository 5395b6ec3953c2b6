"""Terminal programs that measure (`offline`) and look around (`doctor`). Each offers `add_arguments(parser)` and `main(...)`."""
