//! The daemon as a whole: the real program, real jobs, and the clients anybody may write.

mod harness;
mod jobs;
mod program;
mod survival;
