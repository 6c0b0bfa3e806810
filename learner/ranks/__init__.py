"""The processes of one learner, and how they notice that one of them is gone."""
