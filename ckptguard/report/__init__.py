"""Tables, progress and JSON made from result values. Human output only; decides nothing."""
