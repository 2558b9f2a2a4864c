//! The supervisor of one job.
fn main() {}
