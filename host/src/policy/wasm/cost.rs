//! What operators cost in fuel. A unit is about the time of one that is quick, so that a call's fuel bounds its time
//! whatever a module is made of: those that take longer cost as much more. The factors are of x86-64 processors of
//! servers; `cargo bench -p tokenrouter --bench policy` times a module of each kind.

use wasmtime::OperatorCost;

/// Reads and writes of memory: two MiB of it may be beyond all caches but the one that cores share.
const MEMORY: u8 = 12;
/// Conversions and roundings, and everything on vectors: the processor may have no instruction for it.
const SEVERAL: u8 = 4;
/// Quotients and roots of floating-point numbers.
const QUOTIENT: u8 = 10;
/// Quotients of whole numbers, for which older processors take up to 40 ns.
const WHOLE_QUOTIENT: u8 = 16;
/// Calls, each with its own look at fuel, stack and time.
const CALL: u8 = 2;
/// Jumps to one of many places.
const JUMP: u8 = 6;
/// Calls into the server's own code, beside what it does for each byte, element or page.
const SERVER: u8 = 200;

/// The costs of all operators.
pub fn costs() -> OperatorCost {
    let mut costs = OperatorCost::new();
    macro_rules! of_kind {
        (@simd $op:ident) => {
            costs.$op = SEVERAL;
        };
        (@$other:ident $op:ident) => {};
    }
    macro_rules! vectors {
        ($(@$proposal:ident $op:ident $({ $($field:ident: $kind:ty),* })? => $visit:ident ($($more:tt)*))*) => {
            $(of_kind!(@$proposal $op);)*
        };
    }
    wasmparser::for_each_operator!(vectors);
    macro_rules! cost {
        ($cost:expr, $($op:ident)*) => { $(costs.$op = $cost;)* };
    }
    cost!(
        MEMORY,
        I32Load I64Load F32Load F64Load I32Load8S I32Load8U I32Load16S I32Load16U I64Load8S I64Load8U I64Load16S
        I64Load16U I64Load32S I64Load32U I32Store I64Store F32Store F64Store I32Store8 I32Store16 I64Store8 I64Store16
        I64Store32 TableGet TableSet V128Load V128Load8x8S V128Load8x8U V128Load16x4S V128Load16x4U V128Load32x2S
        V128Load32x2U V128Load8Splat V128Load16Splat V128Load32Splat V128Load64Splat V128Load32Zero V128Load64Zero
        V128Store V128Load8Lane V128Load16Lane V128Load32Lane V128Load64Lane V128Store8Lane V128Store16Lane
        V128Store32Lane V128Store64Lane
    );
    cost!(
        SEVERAL,
        F32Ceil F32Floor F32Trunc F32Nearest F64Ceil F64Floor F64Trunc F64Nearest F32Min F32Max F64Min F64Max
        I32TruncF32S I32TruncF32U I32TruncF64S I32TruncF64U I64TruncF32S I64TruncF32U I64TruncF64S I64TruncF64U
        I32TruncSatF32S I32TruncSatF32U I32TruncSatF64S I32TruncSatF64U I64TruncSatF32S I64TruncSatF32U I64TruncSatF64S
        I64TruncSatF64U F32ConvertI32S F32ConvertI32U F32ConvertI64S F32ConvertI64U F64ConvertI32S F64ConvertI32U
        F64ConvertI64S F64ConvertI64U F32DemoteF64 F64PromoteF32 I32Popcnt I64Popcnt
    );
    cost!(QUOTIENT, F32Div F64Div F32Sqrt F64Sqrt F32x4Div F64x2Div F32x4Sqrt F64x2Sqrt);
    cost!(WHOLE_QUOTIENT, I32DivS I32DivU I32RemS I32RemU I64DivS I64DivU I64RemS I64RemU);
    cost!(CALL, Call);
    cost!(JUMP, CallIndirect BrTable);
    cost!(SERVER, MemoryGrow MemoryCopy MemoryFill MemoryInit DataDrop TableGrow TableCopy TableFill TableInit ElemDrop RefFunc);
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_ones_are_the_unit() {
        let costs = costs();
        assert_eq!((costs.I32Add, costs.LocalGet, costs.BrIf, costs.F64Mul), (1, 1, 1, 1));
        assert_eq!((costs.Nop, costs.Block, costs.End), (0, 0, 0));
        assert_eq!((costs.I8x16Popcnt, costs.F32x4Add, costs.V128Load), (SEVERAL, SEVERAL, MEMORY));
        assert_eq!((costs.F64x2Sqrt, costs.I64RemS, costs.MemoryGrow), (QUOTIENT, WHOLE_QUOTIENT, SERVER));
    }
}
