"""All steps of a recurrent layer in one kernel whose blocks meet at barriers."""
