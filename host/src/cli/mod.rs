//! The commands of the program.

mod args;
mod output;
mod plan;
mod printer;
