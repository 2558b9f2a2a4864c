//! Rules of the repository that a compiler does not check.
//!
//! Each module is one rule. `CI` or not, nothing here is skipped: the rules need only the tree itself.

mod generated;
