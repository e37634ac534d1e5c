"""Looks at a model and changes nothing: which attention it computes, where its tokens sit, what it attends to."""
