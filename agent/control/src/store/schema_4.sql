-- Only the number: an earlier program would place jobs without noting it in the documents of lives.
SELECT 1;
