use std::process::ExitCode;

fn main() -> ExitCode {
    tokenrouter::cli::main()
}
