"""Programs and checkers that the tests use."""
