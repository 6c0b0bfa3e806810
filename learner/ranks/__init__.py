"""The processes of one learner, and how they notice that one of them has disappeared."""
