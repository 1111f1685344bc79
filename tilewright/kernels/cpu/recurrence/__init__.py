"""All steps of a recurrent layer in one kernel."""
