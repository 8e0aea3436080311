//! Compilers recur; what is long, and not nested, must not take them down either.

use std::process::{Command, Stdio};

use super::*;
use crate::constraint::compile::MAX_REPETITIONS;

/// Asks a child of the test for its share of the cases: which one, and of how many.
const SHARE: &str = "TOKENROUTER_TEST_LONG_FORMS";
const BEGINS: &str = "compiling ";
const FITS: &str = "all of them fit";

fn cases() -> Vec<(&'static str, Form)> {
    let chain = |link: &dyn Fn(usize) -> Value| {
        let mut defs: serde_json::Map<String, Value> = (0..3000).map(|n| (format!("d{n}"), link(n + 1))).collect();
        defs.insert("d3000".into(), json!({"type": "integer"}));
        schema(json!({"$defs": defs, "$ref": "#/$defs/d0"}))
    };
    let to = |n: usize| json!({"$ref": format!("#/$defs/d{n}")});
    let rules: String = (0..5000).map(|n| format!("r{n}: \"a\" r{}\n", n + 1)).collect();
    let aliases: String = (0..5000).map(|n| format!("r{n}: r{}\n", n + 1)).collect();
    vec![
        ("optional letters", Form::Regex("ab?".repeat(20_000))),
        ("alternatives", Form::Regex(format!("x{}", "|ab".repeat(60_000)))),
        ("different alternatives", Form::Regex((0..20_000).map(|n| format!("{n}x|")).collect::<String>() + "y")),
        ("stars", Form::Regex("a*".repeat(MAX_REPETITIONS))),
        ("choices", Form::Choice((0..20_000).map(|n| format!("choice {n}")).collect())),
        ("an enum", schema(json!({"enum": (0..20_000).collect::<Vec<_>>()}))),
        ("a chain of references", chain(&to)),
        ("a chain of intersections", chain(&|n| json!({"allOf": [to(n), {"type": "integer"}]}))),
        ("a chain of choices", chain(&|n| json!({"anyOf": [to(n), {"const": n}]}))),
        ("a chain of lists", chain(&|n| json!({"type": "array", "items": to(n), "maxItems": 1}))),
        ("a chain of rules", Form::Lark(format!("start: r0\n{rules}r5000: \"b\"\n"))),
        ("a chain of aliases", Form::Lark(format!("start: r0\n{aliases}r5000: \"b\"\n"))),
        (
            "a chain of terminals",
            Form::Lark(
                format!("start: r0\n{}R5000: \"b\"\n", rules.to_uppercase().replace("\"A\"", "\"a\""))
                    .replace("start: r0", "start: R0"),
            ),
        ),
        ("a long sequence", Form::Lark(format!("start: {}\n", "\"a\" ".repeat(40_000)))),
        ("a long choice", Form::Lark(format!("start: \"b\" {}\n", "| \"a\" ".repeat(10_000)))),
    ]
}

/// Compile a form, or refuse it, with the stack that the server gives for it.
fn fit(form: Form) {
    let compiled = std::thread::Builder::new().stack_size(STACK).spawn(|| compile(form, &vocabulary().1));
    if let Ok(grammar) = compiled.unwrap().join().unwrap() {
        let mut matcher = grammar.matcher();
        let first = mask(&mut matcher)[0];
        matcher.follow(&[first]).unwrap();
    }
}

/// In processes of their own, which end at what does not fit.
#[test]
fn long_forms_fit_the_stack() {
    if let Ok(share) = std::env::var(SHARE) {
        let (share, of) = share.split_once('/').unwrap();
        let (share, of): (usize, usize) = (share.parse().unwrap(), of.parse().unwrap());
        for (name, form) in cases().into_iter().skip(share).step_by(of) {
            println!("{BEGINS}{name}");
            fit(form);
        }
        println!("{FITS}");
        return;
    }
    let of = std::thread::available_parallelism().unwrap().get().min(4);
    let child = |share: usize| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "constraint::tests::long::long_forms_fit_the_stack", "--nocapture"]);
        child.env(SHARE, format!("{share}/{of}")).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..of).map(child).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let last = said.lines().filter_map(|line| line.strip_prefix(BEGINS)).next_back();
        assert!(said.contains(FITS), "{last:?} does not fit: {}: {error}", output.status);
    }
}
