//! Native plugins, good and hostile: what loads, what is refused and how, and what a failing hook does.

mod files;
mod hooks;
mod support;
mod versions;
