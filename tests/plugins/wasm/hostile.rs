//! Modules that load and then misbehave: each call ends, and what it did wrong is an error.

use proptest::prelude::*;
use tokenrouter_plugin_api::DecisionKind::{Stay, To};
use tokenrouter_plugin_api::{Handoff, RequestView};

use super::support::{create, decide, doing, module, trapped};

/// What the module's failure says, after good calls before it.
fn failing(bytes: &[u8]) -> String {
    failing_for(1, bytes)
}

/// The same in a call with so many rows.
fn failing_for(rows: usize, bytes: &[u8]) -> String {
    let mut policy = create(bytes).unwrap();
    assert_eq!(decide(&mut *policy, &[5], &[0.5]), Ok(vec![Stay]));
    let failure = decide(&mut *policy, &vec![1000; rows], &vec![0.5; rows]).unwrap_err();
    assert_eq!((failure.plugin.as_str(), failure.hook), ("p", "route"));
    let message = failure.message.clone();
    // Not called any more, whatever the rows.
    let after = decide(&mut *policy, &[5], &[0.5]).unwrap_err();
    assert_eq!(after.message, "not called, because an earlier call of this instance failed");
    assert!(policy.finished(0).is_err());
    message
}

/// [`failing`], in the first call of each of the instances that it is given.
fn failing_each_time(bytes: &[u8]) -> String {
    let message = failing(bytes);
    let kind = message.strip_suffix("; it was started anew 3 times in the minute before");
    kind.unwrap_or_else(|| panic!("{message}")).to_owned()
}

#[test]
fn case_15_calls_without_end() {
    assert_eq!(failing(&trapped("(loop (br 0))")), "used up its fuel of 10200; do less for each row");
    // Bulk operations cost their length before they run.
    let fill = "(loop (memory.fill (i32.const 0x4000) (i32.const 1) (i32.const 0x8000)) (br 0))";
    assert_eq!(failing(&trapped(fill)), "used up its fuel of 10200; do less for each row");
}

#[test]
fn case_21_traps() {
    assert_eq!(failing_each_time(&trapped("unreachable")), "wasm trap: wasm `unreachable` instruction executed");
    let divide = "(drop (i32.div_u (local.get $rows) (i32.sub (local.get $first) (i32.const 1000))))";
    assert!(failing_each_time(&trapped(divide)).contains("integer divide by zero"));
    assert!(
        failing_each_time(&trapped("(i32.store (i32.const -4) (i32.const 1))")).contains("out of bounds memory access")
    );
    let far = "(drop (i32.load offset=4294967295 (i32.const -1)))";
    assert!(failing_each_time(&trapped(far)).contains("out of bounds memory access"));
    assert!(
        failing_each_time(&trapped("(drop (i32.trunc_f32_s (f32.const nan)))"))
            .contains("invalid conversion to integer")
    );
    let route = r#"(func (export "tr_route") (param i32) (result i32)
        (if (i32.eq (i32.load (i32.const 0x2800)) (i32.const 1000)) (then BODY)) (local.get 0))"#;
    let with = |rest: &str, body: &str| failing_each_time(&module(&format!("{rest} {}", route.replace("BODY", body))));
    let message = with("(table 2 funcref) (type $f (func))", "(call_indirect (type $f) (i32.const 1))");
    assert!(message.contains("uninitialized element"), "{message}");
    let message = with("(table 2 funcref) (type $f (func))", "(call_indirect (type $f) (i32.const 7))");
    assert!(message.contains("out of bounds"), "{message}");
    // Cheap calls, so that the stack ends before the fuel; what is left of it is not enough for another time.
    let deep = format!("(func $deep (call $deep)) {}", route.replace("BODY", "(call $deep)"));
    let message = failing_for(30, &module(&deep));
    assert!(message.contains("call stack exhausted; its repetition used up what fuel"), "{message}");
}

#[test]
fn case_16_a_module_that_never_works_does_not_start() {
    let refused = |body: &str| create(&doing(body)).err().unwrap();
    assert_eq!(
        refused("(loop (br 0))"),
        "policy `p` failed in create: a rehearsal with 1 row: used up its fuel of 10200; do less for each row"
    );
    assert!(refused("unreachable").contains("a rehearsal with 1 row: wasm trap: "));
    assert!(refused("(return (i32.const 1))").contains("a rehearsal with 256 rows: tr_route returned 1, expected 256"));
}

#[test]
fn case_12_wrong_lengths() {
    for (length, shown) in [("0", "0"), ("2", "2"), ("-1", "-1"), ("0x80000000", "-2147483648")] {
        let message = failing_each_time(&trapped(&format!("(return (i32.const {length}))")));
        assert_eq!(message, format!("tr_route returned {shown}, expected 1"));
    }
}

#[test]
fn case_13_models_that_do_not_exist() {
    for to in ["3", "1000", "0x80000000", "-1"] {
        let message = failing_each_time(&trapped(&format!("(i32.store (i32.const 0x400) (i32.const {to}))")));
        assert!(
            message.contains("the route has models 0 to 1; write 0 to stay, or a model's number plus 1"),
            "{message}"
        );
    }
}

#[test]
fn decisions_and_how_requests_leave() {
    let set = |to: &str, leave: &str| {
        doing(&format!(
            "(i32.store (i32.const 0x400) (i32.const {to})) (i32.store (i32.const 0x800) (i32.const {leave}))"
        ))
    };
    for (leave, handoff) in [
        ("0", Handoff::default()),
        ("0x80000000", Handoff::drop_candidate()),
        ("1", Handoff::default().budget(1)),
        ("0xffffffff", Handoff::drop_candidate().budget(0x7fff_ffff)),
    ] {
        let mut policy = create(&set("2", leave)).unwrap();
        assert_eq!(decide(&mut *policy, &[5, 6], &[0.5; 2]), Ok(vec![To(1), Stay]));
        let request = |slot| RequestView::new(1, slot, 0, 1, 9, &[5]);
        assert_eq!(policy.send(&request(0), 1), Ok(handoff));
        assert!(policy.send(&request(0), 1).unwrap_err().message.contains("was not handed over"));
        assert!(policy.send(&request(1), 1).unwrap_err().message.contains("was not handed over"));
    }
}

/// Growth past the limits fails as the module can see; it is no trap.
#[test]
fn case_17_growth() {
    // To model 1 if the memory grew to 32 pages and no further.
    let memory = "(i32.store (i32.const 0x400) (i32.mul (i32.const 2) (i32.and
        (i32.or (i32.eq (memory.size) (i32.const 32)) (i32.eq (memory.grow (i32.const 31)) (i32.const 1)))
        (i32.and (i32.eq (memory.grow (i32.const 1)) (i32.const -1)) (i32.eq (memory.grow (i32.const 65535)) (i32.const -1))))))";
    let mut policy = create(&doing(memory)).unwrap();
    for _ in 0..3 {
        assert_eq!(decide(&mut *policy, &[5], &[0.5]), Ok(vec![To(1)]));
    }
    let table = r#"(table 1 funcref) (func (export "tr_route") (param i32) (result i32)
        (i32.store (i32.const 0x400) (i32.mul (i32.const 2)
          (i32.and (i32.eq (table.grow 0 (ref.null func) (i32.const 1024)) (i32.const -1)) (i32.eq (table.size 0) (i32.const 1)))))
        (local.get 0))"#;
    let mut policy = create(&module(table)).unwrap();
    assert_eq!(decide(&mut *policy, &[5], &[0.5]), Ok(vec![To(1)]));
}

/// Counts its calls, and traps in the third of every instance.
const THIRD: &str = r#"(global $calls (mut i32) (i32.const 0))
    (func (export "tr_route") (param i32) (result i32)
      (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
      (if (i32.eq (global.get $calls) (i32.const 3)) (then (unreachable)))
      ;; To model 1 in the second call.
      (i32.store (i32.const 0x400) (i32.mul (i32.const 2) (i32.eq (global.get $calls) (i32.const 2))))
      (local.get 0))"#;

#[test]
fn case_21_a_fresh_instance_repeats_the_call() {
    let mut policy = create(&module(THIRD)).unwrap();
    // The rehearsal left no trace. Then each third call is the first of a new instance.
    for _ in 0..4 {
        assert_eq!(decide(&mut *policy, &[5], &[0.5]), Ok(vec![Stay]));
        assert_eq!(decide(&mut *policy, &[5], &[0.5]), Ok(vec![To(1)]));
    }
    let failure = decide(&mut *policy, &[5], &[0.5]).unwrap_err();
    assert!(failure.message.contains("`unreachable` instruction executed; it was started anew 3 times"), "{failure}");
}

#[test]
fn the_end_of_a_request() {
    // Traps where a request at slot 7 ends; the rehearsal ends one at slot 0.
    let finished = r#"(global $ended (mut i32) (i32.const 0))
        (func (export "tr_finished") (param i32) (global.set $ended (local.get 0))
          (if (i32.eq (local.get 0) (i32.const 7)) (then (unreachable))))
        (func (export "tr_route") (param i32) (result i32)
          (i32.store (i32.const 0x400) (i32.mul (i32.const 2) (i32.eq (global.get $ended) (i32.const 3)))) (local.get 0))"#;
    let mut policy = create(&module(finished)).unwrap();
    policy.finished(3).unwrap();
    assert_eq!(decide(&mut *policy, &[5], &[0.5]), Ok(vec![To(1)]));
    for _ in 0..3 {
        assert_eq!(policy.finished(7), Ok(()));
        assert_eq!(decide(&mut *policy, &[5], &[0.5]), Ok(vec![Stay]), "the fresh instance has no state");
    }
    assert_eq!(policy.finished(7).unwrap_err().hook, "finished");
}

#[test]
fn case_also_more_rows_than_one_call_takes() {
    // To model 1 where the entropy is above 0.5.
    let threshold = r#"(func (export "tr_route") (param $rows i32) (result i32) (local $at i32)
        (loop $next
          (i32.store offset=0x400 (local.get $at)
            (i32.mul (i32.const 2) (f32.gt (f32.load offset=0xc00 (local.get $at)) (f32.const 0.5))))
          (local.set $at (i32.add (local.get $at) (i32.const 4)))
          (br_if $next (i32.lt_u (local.get $at) (i32.mul (local.get $rows) (i32.const 4)))))
        (local.get $rows))"#;
    let mut policy = create(&module(threshold)).unwrap();
    assert_eq!(decide(&mut *policy, &[], &[]), Ok(vec![]));
    for rows in [1, 255, 256, 257, 700] {
        let signal: Vec<f32> = (0..rows).map(|row| row as f32 * 0.37 % 1.0).collect();
        let wanted: Vec<_> = signal.iter().map(|&s| if s > 0.5 { To(1) } else { Stay }).collect();
        assert_eq!(decide(&mut *policy, &vec![5; rows], &signal), Ok(wanted));
    }
}

/// To model 1 where `condition` holds for the first row.
fn condition(condition: &str) -> Vec<u8> {
    doing(&format!("(i32.store (i32.const 0x400) (i32.mul (i32.const 2) {condition}))"))
}

#[test]
fn case_24_one_nan_for_all() {
    let canonical = |value: &str| condition(&format!("(i32.eq (i32.reinterpret_f32 {value}) (i32.const 0x7fc00000))"));
    let entropy = "(f32.load (i32.const 0xc00))";
    let payload = f32::from_bits(0xffc1_2345);
    for value in [
        entropy.to_owned(),
        format!("(f32.mul {entropy} {entropy})"),
        format!("(f32.add {entropy} (f32.const -nan:0x412345))"),
        "(f32.div (f32.const 0) (f32.const 0))".to_owned(),
        "(f32.sqrt (f32.const -1))".to_owned(),
        "(f32.demote_f64 (f64.const -nan:0x8000000000001))".to_owned(),
    ] {
        let mut policy = create(&canonical(&value)).unwrap();
        assert_eq!(decide(&mut *policy, &[5], &[payload]), Ok(vec![To(1)]), "{value}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// A module that mixes all bits of its results gives the same decisions each time.
    #[test]
    fn case_24_the_same_rows_give_the_same_decisions(bits in proptest::collection::vec(any::<u32>(), 1..40)) {
        let mixed = "(i32.and (i32.const 1) (i32.popcnt (i32.xor
            (i32.reinterpret_f32 (f32.div (f32.load (i32.const 0xc00)) (f32.load (i32.const 0xc04))))
            (i32.xor (i32.reinterpret_f32 (f32.sqrt (f32.load (i32.const 0xc00))))
                     (i32.wrap_i64 (i64.reinterpret_f64 (f64.promote_f32 (f32.load (i32.const 0xc04)))))))))";
        let bytes = condition(mixed);
        let signal: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
        let run = || {
            let mut policy = create(&bytes).unwrap();
            signal.windows(2).map(|pair| decide(&mut *policy, &[5, 6], pair).unwrap()).collect::<Vec<_>>()
        };
        prop_assert_eq!(run(), run());
    }
}
