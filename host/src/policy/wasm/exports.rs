//! The exports of a valid module against what the server calls and reads. Pure.

use wasmparser::types::{EntityType, Types};
use wasmparser::{CompositeInnerType, ConstExpr, Export, FuncType, Operator, ValType};

use super::gate::{GateError, damaged};
use super::layout::BLOCK;

/// Bytes of a page of memory.
const PAGE: u64 = 64 << 10;

/// A function that the server calls.
struct Function {
    name: &'static str,
    parameters: &'static [ValType],
    results: &'static [ValType],
    wanted: &'static str,
}

const FUNCTIONS: [Function; 3] = {
    const I32: &[ValType] = &[ValType::I32];
    [
        Function { name: "tr_route", parameters: I32, results: I32, wanted: "a function (i32) -> i32" },
        Function { name: "tr_finished", parameters: I32, results: &[], wanted: "a function (i32) without a result" },
        Function { name: "tr_configure", parameters: &[], results: I32, wanted: "a function () -> i32" },
    ]
};

/// `values`: of the module's globals, as [`value`] has them. Exports that must be there are.
pub fn check(types: &Types, exports: &[Export<'_>], values: &[Option<i32>]) -> Result<(), GateError> {
    let find = |name: &str| exports.iter().find(|export| export.name == name);
    for Function { name, parameters, results, wanted } in FUNCTIONS {
        let fits = |of: &FuncType| of.params() == parameters && of.results() == results;
        match find(name).map(|export| function(types, export)) {
            Some(Some(found)) if fits(found) => {}
            Some(_) => return Err(GateError::Export { name, wanted }),
            None => {}
        }
    }
    let Some(block) = find("tr_block") else { return Ok(()) };
    let not_constant = GateError::Export { name: "tr_block", wanted: "a constant i32 global" };
    match types.as_ref().entity_type_from_export(block) {
        Some(EntityType::Global(global)) if global.content_type == ValType::I32 && !global.mutable => {}
        _ => return Err(not_constant),
    }
    let address = values.get(block.index as usize).copied().flatten().ok_or(not_constant)? as u32;
    // The block is written before any of the module's code could make memory grow.
    let memory = find("memory").and_then(|export| types.as_ref().entity_type_from_export(export));
    let memory = if let Some(EntityType::Memory(memory)) = memory { memory.initial.saturating_mul(PAGE) } else { 0 };
    if u64::from(address) + BLOCK as u64 > memory { Err(GateError::Block { address, memory }) } else { Ok(()) }
}

fn function<'a>(types: &'a Types, export: &Export<'_>) -> Option<&'a FuncType> {
    let Some(EntityType::Func(id)) = types.as_ref().entity_type_from_export(export) else { return None };
    match &types[id].composite_type.inner {
        CompositeInnerType::Func(function) => Some(function),
        _ => None,
    }
}

/// What a global begins with, if that is an i32. `before`: the values of those in front of it.
pub fn value(expression: &ConstExpr<'_>, before: &[Option<i32>]) -> Result<Option<i32>, GateError> {
    let mut stack = Vec::new();
    let mut reader = expression.get_operators_reader();
    while !reader.eof() {
        let operator = reader.read().map_err(damaged)?;
        let next = match operator {
            Operator::End => break,
            Operator::I32Const { value } => Some(value),
            Operator::GlobalGet { global_index } => before.get(global_index as usize).copied().flatten(),
            Operator::I32Add | Operator::I32Sub | Operator::I32Mul => {
                let pair = stack.pop().zip(stack.pop());
                pair.map(|(right, left): (i32, i32)| match operator {
                    Operator::I32Add => left.wrapping_add(right),
                    Operator::I32Sub => left.wrapping_sub(right),
                    _ => left.wrapping_mul(right),
                })
            }
            _ => None,
        };
        let Some(next) = next else { return Ok(None) };
        stack.push(next);
    }
    Ok(stack.pop())
}
