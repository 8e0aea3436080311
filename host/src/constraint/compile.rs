//! From a form to a grammar, within bounds. Takes up to seconds and much stack: [`super::Compiler`] gives it both.

use std::collections::HashSet;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use serde_json::{Value, json};

use super::mask::allows;
use super::matcher::words;
use super::spares::Spares;
use super::{Form, Matcher, Vocabulary};

/// Most bytes of a form.
pub const MAX_BYTES: usize = 256 << 10;
/// Most values or brackets within each other.
pub const MAX_NESTING: usize = 64;

/// Most `*`, `+` and `{` of expressions and grammars. What may come after each of so many repetitions is written out for every
/// one of them: 50,000 took 10 GB.
pub const MAX_REPETITIONS: usize = 2000;

/// Between the parts of a JSON value a model may write a space, or a new line with an indent. Whitespace without
/// an end would let it write nothing else.
const WHITESPACE: &str = r"[\x20\x09]|\x0D?\x0A[\x20\x09]{0,40}";

/// Most states of the lexer of one parser.
pub(super) const MAX_LEXER_STATES: usize = 50_000;

/// Bounds of the library, for compiling and for each token.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_items_in_row: 2_000,
        max_lexer_states: MAX_LEXER_STATES,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        // The grammar and the answer are for no message.
        verbose_errors: false,
    }
}

/// Why a form cannot be asked for; a clause without a full stop.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CompileError(pub String);

/// A form that has been compiled for a vocabulary.
pub struct Grammar {
    form: Form,
    /// At the start of an answer.
    pub(super) start: TokenParser,
    pub(super) spares: Spares,
    pub(super) texts: Arc<[u32]>,
    bytes: usize,
}

impl Grammar {
    pub fn form(&self) -> &Form {
        &self.form
    }

    /// Memory that it takes, about, with what answers leave for later ones.
    pub fn bytes(&self) -> usize {
        self.bytes + self.spares.room()
    }

    /// At the start of an answer, apart from all others.
    pub fn matcher(&self) -> Matcher {
        Matcher::new(self.start.deep_clone(), Arc::clone(&self.texts), None)
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("form", &self.form).finish()
    }
}

/// Compile `form` for `vocabulary`.
pub fn compile(form: Form, vocabulary: &Vocabulary) -> Result<Grammar, CompileError> {
    let grammar = read(&form)?;
    let mut start = vocabulary.factory.create_parser(grammar).map_err(|e| refused(&words(e)))?;
    start.start_without_prompt();
    let bytes = form.bytes() + memory(&start);
    let spares = Spares::new(start.parser.lexer_stats().num_bytes);
    let grammar = Grammar { form, start, spares, texts: Arc::clone(&vocabulary.texts), bytes };
    try_out(&grammar)?;
    Ok(grammar)
}

/// Memory of a compiled form: the library counts its lexer; rules, and the expressions that the lexer was made of, are
/// counted here. Against an allocator that counts it is 0.6 to 1.4 of the truth, 0.3 for thousands of short rules.
fn memory(parser: &TokenParser) -> usize {
    let grammar = parser.parser.grammar();
    let (mut open, mut seen, mut rules) = (vec![grammar.start()], HashSet::new(), 0);
    while let Some(symbol) = open.pop() {
        if !seen.insert(symbol) {
            continue;
        }
        let data = grammar.sym_data(symbol);
        rules += size_of_val(data) + data.name.len();
        for &rule in grammar.rules_of(symbol) {
            let (symbols, parameters, _) = grammar.rule_rhs(rule);
            rules += size_of_val(&rule) + size_of_val(symbols) + size_of_val(parameters);
            open.extend(symbols);
        }
    }
    // The grammar and the lexer have one each.
    let expressions = 2 * grammar.lexer_spec().regex_builder.exprset().num_bytes();
    parser.parser.lexer_stats().num_bytes + expressions + rules
}

/// What the library says of a form, in words for its author.
fn refused(words: &str) -> CompileError {
    if words.contains("NoExtensionBias") {
        return CompileError(NOTHING.into());
    }
    // Its arithmetic ends where numbers do; it catches that itself.
    if words.contains("panic") {
        return CompileError("it is beyond what can be compiled: a number in it is too large, or too fine".into());
    }
    CompileError(words.trim_end_matches('.').into())
}

const NOTHING: &str = "it allows no text that this model's tokens can write, but for the empty one";

/// Some grammars compile, and then allow no token, or cannot take one back.
fn try_out(grammar: &Grammar) -> Result<(), CompileError> {
    let mut parser = llguidance::Matcher::new(Ok(grammar.start.deep_clone()));
    let nothing = || CompileError(NOTHING.into());
    let mask = match parser.compute_mask() {
        Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => return Err(nothing()),
        mask => mask.map_err(|e| refused(&words(e)))?,
    };
    let first = mask.iter().find(|&token| allows(&grammar.texts, token)).ok_or_else(nothing)?;
    let taken_back = parser.consume_token(first).and_then(|()| parser.rollback(1));
    taken_back.map_err(|e| CompileError(format!("a model could not take back what it wrote ({})", words(e))))
}

fn read(form: &Form) -> Result<TopLevelGrammar, CompileError> {
    if form.bytes() > MAX_BYTES {
        return Err(CompileError(format!("it has {} bytes; at most {MAX_BYTES} are possible", form.bytes())));
    }
    match form {
        Form::JsonSchema(text) => schema(text).map(TopLevelGrammar::from_json_schema),
        Form::Regex(text) => {
            check_nesting(bracket_depth(text))?;
            check_repetitions(repetitions(text))?;
            Ok(TopLevelGrammar::from_regex(text))
        }
        Form::Choice(texts) => {
            let literals: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
            Ok(TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}\n", literals.join(" | "))))
        }
        Form::Lark(text) => {
            if text.contains("::=") {
                let message = "it is written with `::=`; write it in Lark, whose rules are `name: …`, \
                               the first of them `start: …`";
                return Err(CompileError(message.into()));
            }
            check_nesting(bracket_depth(text))?;
            check_repetitions(repetitions(text))?;
            Ok(TopLevelGrammar::from_lark(text.clone()))
        }
    }
}

/// A literal of Lark: JSON's, but that one character has to be escaped that need not be there.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A schema with what this server adds to it.
fn schema(text: &str) -> Result<Value, CompileError> {
    let schema: Value = serde_json::from_str(text).map_err(|e| CompileError(format!("it is not JSON: {e}")))?;
    check_nesting(value_depth(&schema))?;
    check_repetitions(repetitions_of_patterns(&schema))?;
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Object(_) => schema,
        _ => return Err(CompileError("a schema that admits something is an object or true".into())),
    };
    if schema.get("x-guidance").is_some() {
        return Err(CompileError("`x-guidance` is this server's; leave it out".into()));
    }
    jsonschema::meta::validate(&schema).map_err(|e| {
        let place = e.instance_path().to_string();
        CompileError(format!("it is no JSON schema: {}: {}", if place.is_empty() { "/" } else { &place }, words(&e)))
    })?;
    schema["x-guidance"] = json!({"whitespace_pattern": WHITESPACE});
    Ok(schema)
}

fn check_nesting(depth: usize) -> Result<(), CompileError> {
    if depth <= MAX_NESTING {
        return Ok(());
    }
    Err(CompileError(format!("it is nested {depth} deep; at most {MAX_NESTING} are possible")))
}

fn check_repetitions(count: usize) -> Result<(), CompileError> {
    if count <= MAX_REPETITIONS {
        return Ok(());
    }
    Err(CompileError(format!("it has {count} repetitions (`*`, `+`, `{{`); at most {MAX_REPETITIONS} are possible")))
}

fn repetitions(expression: &str) -> usize {
    expression.bytes().filter(|byte| matches!(byte, b'*' | b'+' | b'{')).count()
}

/// Of all expressions in a schema.
fn repetitions_of_patterns(schema: &Value) -> usize {
    match schema {
        Value::Array(items) => items.iter().map(repetitions_of_patterns).sum(),
        Value::Object(map) => {
            let of_key = |(key, value): (&String, &Value)| match (key.as_str(), value) {
                ("pattern", Value::String(pattern)) => repetitions(pattern),
                ("patternProperties", Value::Object(patterns)) => {
                    let names = patterns.keys().map(|pattern| repetitions(pattern)).sum::<usize>();
                    names + patterns.values().map(repetitions_of_patterns).sum::<usize>()
                }
                _ => repetitions_of_patterns(value),
            };
            map.iter().map(of_key).sum()
        }
        _ => 0,
    }
}

fn value_depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(value_depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(value_depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Brackets that are open at once, at most. Those of literals count as well: the bound is wide enough.
fn bracket_depth(text: &str) -> usize {
    let (mut depth, mut most) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        most = most.max(depth);
    }
    most
}
